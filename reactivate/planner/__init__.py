"""From a budget to a plan: profile a step, solve, prove.

`reactivate.plan` is the way in. `devices` has what named devices can do.
"""
