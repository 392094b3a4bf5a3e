"""python -m recipes.plan checkpoint=<checkpoint> <overrides of train>: preview a load on that layout."""

if not __package__:  # run by path: sys.path[0] is this folder, whose inspect.py would hide the standard library's
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("plan", writes=False)
def main(cfg: DictConfig) -> int:
    from recipes.commands.planning import PlanKeys, plan, show
    from recipes.support.config import popped_keys

    keys = popped_keys(cfg, PlanKeys)
    found = plan(keys, cfg)
    show(found, keys)
    return 0 if found.forecast.loads else 1


if __name__ == "__main__":
    main()
