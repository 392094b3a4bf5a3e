"""python -m recipes.plan checkpoint=<checkpoint> <overrides of train>: say what a load on that layout would do."""

if not __package__:  # run by path: this folder comes first, and its inspect.py would hide the standard library's
    import sys
    from os.path import abspath, dirname

    sys.path[0] = dirname(dirname(abspath(__file__)))

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("plan", writes=False)
def main(cfg: DictConfig) -> int:
    from recipes.commands.planning import keys_of, plan, show

    keys = keys_of(cfg)
    found = plan(keys, cfg)
    show(found, keys)
    return 0 if found.forecast.loads else 1


if __name__ == "__main__":
    main()
