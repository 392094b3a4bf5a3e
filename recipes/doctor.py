"""python -m recipes.doctor: train a few steps and report the true sharing pattern of each component."""

if not __package__:  # run by path: sys.path[0] is this folder, whose inspect.py would hide the standard library's
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("doctor", writes=False)
def main(cfg: DictConfig) -> int:
    from recipes.commands.patterns import DoctorKeys, examine, require_resume, show
    from recipes.support.config import checked, popped_keys
    from recipes.support.launch import launch
    from recipes.support.ranks import num_existing

    keys = popped_keys(cfg, DoctorKeys)
    run = require_resume(checked(cfg, num_ranks=num_existing()))
    result = launch(examine, run | {"doctor": {"steps": keys.doctor.steps}})
    return 0 if result is None else show(result, as_json=keys.json)


if __name__ == "__main__":
    main()
