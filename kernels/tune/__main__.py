"""`python -m kernels.tune`; command.py says what it does."""

from kernels.tune.command import main

if __name__ == "__main__":
    main()
