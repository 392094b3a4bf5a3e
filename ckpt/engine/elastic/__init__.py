"""Updates while rollouts come and go.

Files, in the order in which data travels:

    membership              epochs and calls
    membership_store        what the lead and its rollouts tell each other
    elastic                 the engine
    late                    the newest version for a rollout that comes late
"""
