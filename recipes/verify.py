"""python -m recipes.verify path=<checkpoint or folder of checkpoints>: read every byte and report damage."""

if not __package__:  # run by path: sys.path[0] is this folder, whose inspect.py would hide the standard library's
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("verify", writes=False, trouble=2)
def main(cfg: DictConfig) -> int:
    from ckpt.cli.reading import ReadingKeys, verify
    from recipes.support.config import command_keys

    return verify(command_keys(cfg, ReadingKeys))


if __name__ == "__main__":
    main()
