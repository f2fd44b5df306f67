"""When a job gets certificates: at its start, and again before they expire."""

from __future__ import annotations

from persia_k8s.reconcile.plan import Situation, parse_time, time_text

_DAY_S = 86_400


def provide(situation: Situation) -> None:
    """Has certificates issued where they are missing or due; notes whether the job has any."""
    plan, scale = situation.plan, situation.scale
    situation.update(tls=scale.tls)
    if not scale.tls:
        return
    lifetime_s = situation.job.spec.security.certificate_days * _DAY_S
    until = situation.before.certificates_until
    left_s = (parse_time(until) - situation.now).total_seconds() if until else 0.0
    # After two thirds: an operator that was away for a third of the lifetime still renews in time.
    due_s = left_s - lifetime_s / 3
    if due_s > 0:
        plan.due_s = min(plan.due_s, due_s)
        return
    situation.update(certificates_until=time_text(situation.after(lifetime_s)))
    plan.issues_certificates = True
    if until:
        situation.event("CertificatesRenewed", f"valid until {plan.status.certificates_until}")
