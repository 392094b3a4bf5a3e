"""python -m recipes.inspect path=<checkpoint or folder of checkpoints>: show its content."""

if not __package__:  # run by path: sys.path[0] is this folder, and this file would hide the standard library's inspect
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("inspect", writes=False)
def main(cfg: DictConfig) -> None:
    from recipes.commands.reading import InspectKeys, keys_of, show

    show(keys_of(cfg, InspectKeys))


if __name__ == "__main__":
    main()
