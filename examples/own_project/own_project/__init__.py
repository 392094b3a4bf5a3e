"""A project of your own: a model and data that `python -m recipes.train` trains, without a change of this repository."""
