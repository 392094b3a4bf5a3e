"""Layouts of the model over ranks: one class for each value of `parallel=`, whose keyword arguments are the keys."""
