"""Updates while rollouts join and leave.

Files, in the order in which data travels:

    membership              epochs (from one change of members to the next) and calls (the start of an update)
    membership_store        messages between the lead and its rollouts
    elastic                 the engine
    catch_up                the newest weights for a rollout that joins; its program calls this, as recipes/training/joining.py does
"""
