"""The command `reactivate`: plan, show, verify, explain, run, demo, devices, doctor.

What a command answers goes to stdout, all else to stderr. Exit codes:

====  ================================================================================================================
0     done; the answer is yes
1     the answer is no: the model is not the same, no plan fits, the demo's two runs differ
2     usage: an option, a target, a policy or a file that cannot be understood
3     an extra is not installed
4     something raised: most often the target's own code
130   interrupted
====  ================================================================================================================

With `--json` stdout has one JSON document, whatever happens: the answer, or {"error": {"kind", "message"}}.
"""

from reactivate.cli.commands import command

__all__ = ["command"]
