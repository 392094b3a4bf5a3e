"""How the model is laid out over the ranks: one class per choice of `parallel=`; its keywords are the choice's keys."""
