"""Updates while rollouts join and leave.

Files, in the order in which data travels:

    membership              epochs and calls
    membership_store        messages between the lead and its rollouts
    elastic                 the engine
    late                    the newest version for a rollout that joins a running job
"""
