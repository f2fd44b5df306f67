"""One pass of the operator over a job, as a pure function: what it sees and remembers gives what it does.

Passes are repeated for ever and after every restart of the operator, so each step is one that may be taken
again: nothing depends on having seen a change happen.
"""

from persia_k8s.reconcile.plan import Event, Plan, parse_time, time_text
from persia_k8s.reconcile.reconcile import reconcile, take_refusals
from persia_k8s.reconcile.refuse import lacks_pods

__all__ = ["Event", "Plan", "lacks_pods", "parse_time", "reconcile", "take_refusals", "time_text"]
