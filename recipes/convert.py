"""python -m recipes.convert src=<checkpoint> dst=<new folder> to=<format>: write a checkpoint in another format."""

if not __package__:  # run by path: sys.path[0] is this folder, whose inspect.py would hide the standard library's
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("convert", writes=False)
def main(cfg: DictConfig) -> None:
    from recipes.commands.converting import convert_on_ranks, keys_of, run_of, show
    from recipes.commands.converting_megatron import Converted
    from recipes.support.launch import launch

    keys = keys_of(cfg)
    if (found := launch(convert_on_ranks, run_of(keys))) is not None:
        show(Converted(**found), keys)


if __name__ == "__main__":
    main()
