"""python -m recipes.convert src=<checkpoint> dst=<new folder> to=<format>: write a checkpoint in another format."""

if not __package__:  # run by path: sys.path[0] is this folder, whose inspect.py would hide the standard library's
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("convert", writes=False)
def main(cfg: DictConfig) -> None:
    from recipes.commands.converting import convert, keys_of, show

    keys = keys_of(cfg)
    show(convert(keys), keys)


if __name__ == "__main__":
    main()
