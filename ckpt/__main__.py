"""`python -m ckpt` is the command `ckpt`, for launchers that start a module on every rank."""

from ckpt.cli.main import main

if __name__ == "__main__":
    main()
