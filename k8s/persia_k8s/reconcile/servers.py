"""The servers of a job: that they are there, are what the spec asks for, and are ready."""

from __future__ import annotations

from collections.abc import Sequence

from persia_k8s.builders.gangs import pod_groups
from persia_k8s.builders.manifest import Manifest, spec_hash
from persia_k8s.builders.security import network_policies
from persia_k8s.builders.servers import disruption_budget, services, stateful_set
from persia_k8s.names import PAIR, Role, object_name, pod_name
from persia_k8s.observation import PodView
from persia_k8s.reconcile import certificates, finish, health, resize
from persia_k8s.reconcile.plan import Situation
from persia_k8s.status import Phase, Stage

_RESIZE_REFUSED = (
    "embeddingParameterServer.replicas: {wanted} is refused, the job continues with {has}: rows of "
    "servers with standbys move through a checkpoint; set resizeCheckpoint to a directory or URL that all "
    "servers and NN workers reach"
)
_RESIZE_FIXED = (
    "embeddingParameterServer.replicas: {wanted} is refused, the job continues with {has}: start another job "
    "beside this one, and let requests go there"
)
_RESIZE_WAITS = (
    "embeddingParameterServer.replicas: {wanted} takes effect once the training runs, until then {has}"
)
_RESIZE_FAILED = (
    "embeddingParameterServer.replicas: {wanted} is given up, the job continues with {has}: condition "
    "Resized says why. To try again, set {has} and then {wanted}, or change another field of the role"
)
_RESIZE_DEFERRED = (
    "{role}.replicas: {wanted} takes effect when the training is next started, until then {has}: data "
    "loaders and NN workers count each other once, at their start"
)
_TLS_FIXED = (
    "security.tls: {wanted} takes effect in a new job, or when this one is suspended and resumed: processes "
    "with certificates refuse those without"
)
_STANDBYS_FIXED = (
    "embeddingParameterServer.standbys: {wanted} takes effect in a new job, or when this one is suspended "
    "and resumed: the processes of a job learn at their start whether servers have standbys"
)

GONE = ""  # in `JobStatus.servers`: the pod has been deleted on purpose


def provide(situation: Situation, *, has_training: bool) -> bool:
    """Creates what is missing and changes what may be changed; returns whether all servers are ready.

    `has_training`: data loaders or NN workers are there, which would not survive a change of the servers; or
    predictions are asked for.
    """
    plan, scale = situation.plan, situation.scale
    certificates.provide(situation)
    section, before = situation.job.spec.embedding_parameter_server, situation.before
    situation.update(standbys=section.standbys)
    # Only a number that is raised later asks for something: the servers begin as the spec has them.
    if before.phase is Phase.PENDING and not before.attempt:
        situation.update(rebalance=section.rebalance)
    for manifest in [*network_policies(situation.job), *services(situation.job)]:
        _apply_if_different(situation, manifest)
    _apply_gangs(situation)
    for role in scale.replicas:
        if role is not Role.STANDBY:  # one budget for both of a pair
            budget = disruption_budget(situation.job, role, resize.counted(situation))
            _apply_if_different(situation, budget)
    plan.delete_objects += _old_sets(situation)
    drifted: list[Role] = []
    lacking: dict[Role, str] = {}
    for role in (role for role in scale.replicas if role.is_server):
        is_live, is_fixed = _may_change(situation, role, drifted, has_training=has_training)
        manifest = stateful_set(situation.job, role, scale, situation.images)
        pods = situation.observed.of_role(role)
        current, stale = _split_stale(pods, manifest)
        if not is_fixed:
            _apply_if_different(situation, manifest)
            pods = current
            plan.delete_pods += stale
        elif is_live:
            # Servers come and go; those of a training keep what they were made of.
            _apply_if_different(situation, manifest)
            drifted += [role] if stale and not situation.job.is_inference else []
        elif _stored_hash(situation, manifest) is None:
            plan.apply.append(manifest)
        elif _stored_hash(situation, manifest) != spec_hash(manifest):
            drifted.append(role)
        if text := _lacking(role, scale.replicas[role], pods):
            lacking[role] = text
    if has_training:
        resize.report(situation)
    _report_readiness(situation, list(lacking.values()))
    _report_spec(situation, drifted)
    _report_restarts(situation)
    _replace_waiting(situation)
    # A training that is started again needs the rows, and not two copies of them.
    if situation.before.attempt and _has_a_copy_of_all_rows(situation):
        lacking = {role: text for role, text in lacking.items() if role not in PAIR}
    return not lacking


def _may_change(
    situation: Situation, role: Role, drifted: Sequence[Role], *, has_training: bool
) -> tuple[bool, bool]:
    """Whether the StatefulSet may change while the job runs, and whether pods may not be replaced by us."""
    if situation.job.is_inference:
        # Model and rows are of one checkpoint: what reads the one waits with what reads the other.
        is_live = role is not Role.PARAMETER_SERVER and Role.PARAMETER_SERVER not in drifted
        return is_live, has_training
    # Rows, and the connections of all others, outlive a restart of the training.
    is_live = role is Role.EMBEDDING_WORKER
    return is_live, has_training or (not is_live and situation.before.attempt > 0)


def replace_parameter_servers(situation: Situation) -> str:
    """Ends the old ones and starts as many as the scale says. Returns what is lacking, "" for nothing."""
    _apply_gangs(situation)
    lacking = []
    for role in (role for role in PAIR if role in situation.scale.replicas):
        manifest = stateful_set(situation.job, role, situation.scale, situation.images)
        _apply_if_different(situation, manifest)
        current, stale = _split_stale(situation.observed.of_role(role), manifest)
        situation.plan.delete_pods += stale
        lacking.append(_lacking(role, situation.scale.replicas[role], current))
    return "; ".join(filter(None, lacking))


def _old_sets(situation: Situation) -> list[tuple[str, str]]:
    """StatefulSets of parameter servers that have handed their rows over, or never received any."""
    job, under_way = situation.job.name, situation.before.resize
    kept = {object_name(job, Role.PARAMETER_SERVER, situation.scale.generation)}
    if under_way is not None:
        kept.add(object_name(job, Role.PARAMETER_SERVER, under_way.generation))
    first = object_name(job, Role.PARAMETER_SERVER)
    sets = [(kind, name) for kind, name in situation.observed.objects if kind == "StatefulSet"]
    return [(kind, name) for kind, name in sets if name.startswith(first) and name not in kept]


def _apply_gangs(situation: Situation) -> None:
    if situation.observed.has_pod_groups:
        for manifest in pod_groups(situation.job, situation.scale):
            _apply_if_different(situation, manifest)


def _apply_if_different(situation: Situation, manifest: Manifest) -> None:
    if _stored_hash(situation, manifest) != spec_hash(manifest):
        situation.plan.apply.append(manifest)


def _stored_hash(situation: Situation, manifest: Manifest) -> str | None:
    return situation.observed.objects.get((manifest["kind"], manifest["metadata"]["name"]))


def _split_stale(pods: Sequence[PodView], manifest: Manifest) -> tuple[list[PodView], list[PodView]]:
    """Pods made of the template in `manifest`, and others that are not going already."""
    # The template rather than the set: a change of the number of pods makes none of them stale.
    template_hash = spec_hash(manifest["spec"]["template"])
    current = [pod for pod in pods if pod.spec_hash == template_hash]
    stale = [pod for pod in pods if pod.spec_hash != template_hash and not pod.is_deleting]
    return current, stale


def _lacking(role: Role, replicas: int, pods: Sequence[PodView]) -> str:
    """The reason why the role is not ready; "" when it is."""
    num_ready = sum(pod.is_ready and not pod.is_deleting for pod in pods)
    if num_ready >= replicas:
        return ""
    troubles = [f"{pod.name}: {pod.trouble}" for pod in pods if pod.trouble]
    return "; ".join([f"{role.field} {num_ready} of {replicas}", *troubles[:3]])


def _report_readiness(situation: Situation, lacking: Sequence[str]) -> None:
    if not lacking:
        situation.set_condition("ServersReady", True, "AllReady")
        return
    is_news = situation.set_condition("ServersReady", False, "NotReady", "; ".join(lacking))
    is_expected = resize.explains_absence(situation, Role.PARAMETER_SERVER)
    if is_news and not is_expected and situation.before.is_training:
        situation.event("ServersNotReady", "; ".join(lacking), is_warning=True)


def _report_spec(situation: Situation, drifted: Sequence[Role]) -> None:
    """Says what of the spec is not in force, and why."""
    job, scale = situation.job, situation.scale
    messages = []
    is_refused = False
    for role, wanted in job.replicas.items():
        has = scale.replicas[role]
        # Standbys are as many as servers, whose line says the same.
        is_told = role is Role.STANDBY or (role is Role.EMBEDDING_WORKER and resize.is_going_on(situation))
        if has != wanted and not is_told:
            text = _RESIZE_DEFERRED
            if role is Role.PARAMETER_SERVER:
                has_failed = situation.before.failed_resize == job.wish
                has_no_place = Role.STANDBY in scale.replicas and job.spec.resize_checkpoint is None
                if situation.before.is_training and not (has_failed or has_no_place or job.is_inference):
                    continue  # under way: `Resized` says how far
                is_refused = has_failed or has_no_place
                text = _RESIZE_REFUSED if has_no_place else _RESIZE_FAILED if has_failed else _RESIZE_WAITS
                if job.is_inference:
                    is_refused, text = True, _RESIZE_FIXED
            messages.append(text.format(role=role.field, wanted=wanted, has=has))
    for role in drifted:
        if role is Role.EMBEDDING_WORKER and not job.is_inference:
            messages.append(f"{role.field}: the changed pod takes effect when the training is next started")
        else:
            messages.append(f"{role.field}: the changed pod takes effect in a new job only")
    if job.spec.security.tls != scale.tls:
        messages.append(_TLS_FIXED.format(wanted=str(job.spec.security.tls).lower()))
    if situation.wanted_standbys != job.spec.embedding_parameter_server.standbys:
        messages.append(_STANDBYS_FIXED.format(wanted=situation.wanted_standbys))
    reason = "ResizeRefused" if is_refused else "Deferred"
    if not messages:
        situation.set_condition("SpecApplied", True, "AsSpecified")
    elif situation.set_condition("SpecApplied", False, reason, "; ".join(messages)):
        situation.event(reason, "; ".join(messages), is_warning=True)


def _report_restarts(situation: Situation) -> None:
    """Tells of servers that were started anew, and gives a training up whose servers keep failing."""
    pods = [pod for pod in situation.observed.pods if pod.role.is_server]
    seen = {pod.name: pod.incarnation for pod in pods if not _is_replaced(situation, pod)}
    # One that starts again before it takes over loses nothing.
    if situation.before.is_moving(Stage.STARTING, Stage.MOVING):
        seen |= {pod.name: pod.incarnation for pod in situation.others}
    known = situation.before.servers
    if situation.before.is_training:
        lossy = lost_rows(situation)
        for pod in (pod for pod in pods if _new_restarts(situation, pod)):
            lost = ": the rows that it held are lost" if pod.name in lossy else ""
            situation.event("ServerRestarted", f"{pod.name} was started anew{lost}", is_warning=True)
        if lossy:
            health.report_lost_rows(situation, ", ".join(lossy))
    expected = {
        pod_name(situation.job.name, role, index, _generation(situation, role))
        for role, replicas in situation.scale.replicas.items()
        for index in range(replicas)
    }
    if situation.before.is_moving(Stage.STARTING, Stage.MOVING):
        expected |= {pod.name for pod in situation.others}
    retired = {name: GONE for name in known if name not in expected}
    situation.update(servers={**known, **retired, **seen})
    limit = situation.job.spec.backoff_limit
    worn = [pod for pod in pods if pod.num_restarts - _early_restarts(situation, pod) > limit]
    # A server that fails again and again loses its rows each time, so training on is of no use. Before the
    # training, a standby that fails is a mistake in its config.
    if situation.before.is_training and _has_a_copy_of_all_rows(situation):
        worn = [pod for pod in worn if pod.role not in PAIR]
    if worn and not situation.job.is_inference:
        text = "; ".join(
            f"{pod.name}, started {pod.num_restarts + 1} times: {pod.trouble}" for pod in worn[:3]
        )
        finish.fail(situation, "ServerFailed", text)


def _replace_waiting(situation: Situation) -> None:
    """After a resize, a container that is started again waits for rows until another new server answers. If
    none does, its pod is replaced: the StatefulSet's pods now begin without rows."""
    pods = situation.observed.of_role(Role.PARAMETER_SERVER)
    # Never later than in the first pass that sees it: it may have begun to serve by then.
    anew = [pod for pod in pods if pod.gathers and _new_restarts(situation, pod)]
    # If one is ready, the others begin, too. All may have restarted while the operator was away.
    if not any(pod.is_ready for pod in pods):
        situation.plan.delete_pods += [pod for pod in anew if not pod.is_deleting]
        # This pass counts the restart, so that the new pod is none. If it gathers, too, it is not replaced.
        gone = {pod.name: GONE for pod in anew}
        situation.update(servers={**situation.plan.status.servers, **gone})


def _is_replaced(situation: Situation, pod: PodView) -> bool:
    """Whether an earlier pass has deleted it, and counted its restart."""
    return pod.is_deleting and situation.before.servers.get(pod.name, GONE) == GONE


def _early_restarts(situation: Situation, pod: PodView) -> int:
    """Of a pod that took over from others: at most, before it did."""
    return situation.before.early_restarts if pod.gathers else 0


def lost_rows(situation: Situation) -> list[str]:
    """Pods that were started anew since the last pass, and whose rows no other pod has."""
    if situation.job.is_inference:
        return []
    lost = []
    for pods in _pairs(situation):
        anew = [pod for pod in pods if _new_restarts(situation, pod)]
        # Either of the two may have been the server; one that is not ready may not have had all rows.
        if anew and not any(pod.is_ready and pod not in anew for pod in pods):
            lost += [pod.name for pod in anew]
    return lost


def _has_a_copy_of_all_rows(situation: Situation) -> bool:
    """Whether there are standbys, and of each pair at least one pod is ready."""
    return Role.STANDBY in situation.scale.replicas and all(
        any(pod.is_ready and not pod.is_deleting for pod in pods) for pods in _pairs(situation)
    )


def _pairs(situation: Situation) -> list[list[PodView]]:
    """The pods of each parameter server and its standby, as far as there are any."""
    by_name = {pod.name: pod for pod in situation.observed.pods}
    indices = range(situation.scale.replicas[Role.PARAMETER_SERVER])
    names = (
        [pod_name(situation.job.name, role, index, _generation(situation, role)) for role in PAIR]
        for index in indices
    )
    return [[by_name[name] for name in pair if name in by_name] for pair in names]


def num_new_restarts(situation: Situation, role: Role) -> int:
    """Restarts of a server role since the last pass."""
    return sum(_new_restarts(situation, pod) for pod in situation.observed.of_role(role))


def _new_restarts(situation: Situation, pod: PodView) -> int:
    known = situation.before.servers.get(pod.name, GONE)
    uid, _, number = known.partition("/")
    if known != GONE and uid == pod.uid:
        return pod.num_restarts - int(number)
    if _is_replaced(situation, pod):
        return 0
    # A replaced pod is a restart of its server, but for those that the operator itself has replaced.
    is_replaced = known != GONE and situation.before.is_training
    return pod.num_restarts + is_replaced


def _generation(situation: Situation, role: Role) -> int:
    return situation.scale.generation if role is Role.PARAMETER_SERVER else 0
