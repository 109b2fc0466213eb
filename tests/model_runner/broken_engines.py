"""Engines that fail on purpose, in a module of their own: a child process makes them by name."""

import os
import time

from model_runner.request import RequestOutput
from tests.ready_engine import ReadyEngine


class ExplodingEngine(ReadyEngine):
    """Breaks in its fifth step."""

    def step(self) -> list[RequestOutput]:
        if self.stats().num_steps >= 4:
            raise RuntimeError("the device is gone")
        return super().step()


class CrashingEngine(ReadyEngine):
    """Takes its process with it in its fifth step."""

    def step(self) -> list[RequestOutput]:
        if self.stats().num_steps >= 4:
            os._exit(9)
        return super().step()


class SlowlyClosingEngine(ReadyEngine):
    """Needs a second to close."""

    def close(self) -> None:
        time.sleep(1)
        super().close()


class OddError(Exception):
    """Cannot be made again from its own arguments, as a pickle would."""

    def __init__(self, number: int, words: str) -> None:
        super().__init__(words)


def refuse_to_be_built() -> ReadyEngine:
    raise OddError(1, "there is no such engine")
