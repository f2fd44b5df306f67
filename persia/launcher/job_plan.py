"""The plan of a training job: processes and memory of each role, its speed, and what limits the job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from persia.errors import ConfigError
from persia.launcher.job_costs import (
    BROKER,
    LOADERS,
    LOOP,
    ONE_PROCESS,
    RANKS,
    SERVERS,
    WORKERS,
    Constants,
    Hosts,
    Job,
    Role,
    Traffic,
    work,
)
from persia.launcher.pipeline_rate import Stage, batches_per_s

_USABLE_MEMORY = 0.9  # dumps, requests and the system need the rest


@dataclass(frozen=True)
class RolePlan:
    """The processes of a role. Bytes and processor time are those of a batch, all processes together."""

    count: int
    memory_bytes: float | None  # of each; None: not predicted
    received_bytes: float
    sent_bytes: float
    cpu_s: float
    thread_s: float  # of that, what a process does in one thread: the loop of a rank, all of a data loader
    samples_per_s: float | None  # of all processes; None: they share a machine
    limit: str  # what bounds it: processor, thread, network or device


@dataclass(frozen=True)
class Plan:
    """The prediction for one job."""

    num_rows: float
    row_bytes: float
    ids_of_batch: int
    rows_of_batch: float
    traffic: Traffic
    roles: dict[str, RolePlan]
    samples_per_s: float
    limit: str  # role and resource
    fits: bool  # whether the rows fit the memory


def plan_job(job: Job, hosts: Hosts, constants: Constants, target: float | None = None) -> Plan:
    """Predicts a job on `hosts`; a role without a count gets as many processes as `target` samples/s need.

    Without `target` the ranks decide. Raises ConfigError if neither says how fast the job shall be.
    """
    # Ranks first: their rate is the target of the roles that follow, where the user names none.
    given = {name: getattr(hosts, name).count for name in (RANKS, LOADERS, WORKERS, BROKER, SERVERS)}
    if hosts.machine is None and target is None and given[RANKS] is None:
        raise ConfigError("ranks.count=None: give it, or the speed that you need as --samples-per-s")
    counts = {name: count or 1 for name, count in given.items()}
    total, base = job.num_rows * job.row_bytes, constants.server_mib * 2**20
    if hosts.machine is None and given[SERVERS] is None:
        gib = hosts.parameter_servers.memory_gib or 0
        if (room := gib * 2**30 * _USABLE_MEMORY - base) <= 0:
            raise ConfigError(
                f"parameter_servers.memory_gib={gib} has no room for rows: a server without rows takes "
                f"{constants.server_mib:.0f} MiB"
            )
        counts[SERVERS] = max(1, math.ceil(total / room))
    roles: dict[str, RolePlan] = {}
    for name in counts:
        role: Role = getattr(hosts, name)
        # Anew for each role: counts of the roles before it may have grown, and traffic depends on them.
        traffic = Traffic.of(job, counts[SERVERS], counts[RANKS])
        received, sent = traffic.by_role()[name]
        cpu_s, thread_s = _costs(name, job, traffic, constants, counts[SERVERS])
        if hosts.machine is None and name == RANKS:
            thread_s -= _shared_by_torch_s(job, role)
        rate, limit = _rate(role, job.batch_size, cpu_s, thread_s, max(received, sent))
        if hosts.machine is None and target is not None and given[name] is None and name != BROKER:
            counts[name] = max(counts[name], math.ceil(target / rate))
        count = counts[name]
        target = target or rate * count  # the roles that follow keep up with the ranks
        memory = total / count + base if name == SERVERS else None
        of_all = None if hosts.machine else rate * count
        roles[name] = RolePlan(count, memory, received, sent, cpu_s, thread_s, of_all, limit)
    if hosts.machine is None:
        rate, limit = _slowest(job, hosts, roles)
        needed, memory_gib = roles[SERVERS].memory_bytes or 0, hosts.parameter_servers.memory_gib
    else:
        rate, limit = _shared(job, hosts.machine, roles, _stages(job, roles))
        device = hosts.ranks.samples_per_s
        if device is not None and device * counts[RANKS] < rate:
            rate, limit = device * counts[RANKS], f"{RANKS}: device"
        needed, memory_gib = total + counts[SERVERS] * base, hosts.machine.memory_gib
    fits = needed <= (memory_gib or math.inf) * 2**30 * _USABLE_MEMORY
    sizes = job.num_rows, job.row_bytes, job.num_ids, job.num_distinct
    return Plan(*sizes, traffic, roles, rate, limit, fits)


def plan_process(job: Job, machine: Role, constants: Constants) -> Plan:
    """Predicts a job in one process, without servers. Its memory is that of rows alone."""
    traffic, total = Traffic.of(job, 1, 1), job.num_rows * job.row_bytes
    cpu_s, loop_s = _costs(ONE_PROCESS, job, traffic, constants, 1)
    roles = {ONE_PROCESS: RolePlan(1, total, 0, 0, cpu_s, loop_s, None, "processor")}
    # Only the loop was measured apart. What the others share is divided evenly; the sum of processor times,
    # which limits most jobs of one process, does not depend on it.
    # The threads beside the loop: one that makes batches, those that look up, and those that update.
    third_s = (cpu_s - loop_s - job.read_cpu_s) / 3
    stages = [
        Stage(third_s + job.read_cpu_s, threads=1),
        Stage(third_s, has_permit=True),
        Stage(loop_s, threads=1, has_permit=True),
        Stage(third_s, has_permit=True),
    ]
    rate, limit = _shared(job, machine, roles, stages)
    fits = total <= (machine.memory_gib or math.inf) * 2**30 * _USABLE_MEMORY
    sizes = job.num_rows, job.row_bytes, job.num_ids, job.num_distinct
    return Plan(*sizes, traffic, roles, rate, limit, fits)


def _costs(
    name: str, job: Job, traffic: Traffic, constants: Constants, num_servers: int
) -> tuple[float, float]:
    """Processor time of a batch in all processes of a role, and what of it is done in one thread."""
    done = work(job, traffic, num_servers)
    cpu_s = getattr(constants, name).seconds(done[name])
    if name in (RANKS, ONE_PROCESS):
        loop_s = constants.loop.seconds(done[LOOP]) + job.dense_cpu_s
        return cpu_s + loop_s + (job.read_cpu_s if name == ONE_PROCESS else 0.0), loop_s
    if name == LOADERS:  # Python makes the batches of a loader one by one
        return cpu_s + job.read_cpu_s, cpu_s + job.read_cpu_s
    return cpu_s, 0.0


def _stages(job: Job, roles: Mapping[str, RolePlan]) -> list[Stage]:
    """The way of a batch. Half of what a role does beside its thread is for the lookup."""
    ranks, servers = roles[RANKS], roles[SERVERS]
    beside = [
        Stage((ranks.cpu_s - ranks.thread_s) / 2, has_permit=True),
        Stage(roles[WORKERS].cpu_s / 2, has_permit=True),
        Stage(servers.cpu_s / 2, pieces=servers.count, has_permit=True),
    ]
    return [
        Stage(roles[LOADERS].cpu_s, threads=roles[LOADERS].count),
        Stage(roles[BROKER].cpu_s),
        *beside,
        Stage(ranks.thread_s, threads=ranks.count, has_permit=True),
        *beside,
    ]


def _shared(job: Job, machine: Role, roles: Mapping[str, RolePlan], stages: list[Stage]) -> tuple[float, str]:
    """Samples/s of a job whose processes share a machine, and what limits it."""
    cores, num_ranks = machine.cores or 1.0, roles[RANKS].count if RANKS in roles else 1
    rate = batches_per_s(stages, cores, job.in_flight, num_ranks)
    largest = max(roles, key=lambda name: roles[name].cpu_s)
    # Names the limit by what is used most: the rate itself comes from the simulation.
    used = {f"{largest}: processor": rate * sum(role.cpu_s for role in roles.values()) / cores}
    used |= {f"{name}: thread": rate * role.thread_s / role.count for name, role in roles.items()}
    in_flight_s = sum(stage.cpu_s / stage.pieces for stage in stages if stage.has_permit)
    used[f"{RANKS}: batches in flight"] = rate * in_flight_s / (job.in_flight * num_ranks)
    return rate * job.batch_size, max(used, key=lambda name: used[name])


def _slowest(job: Job, hosts: Hosts, roles: Mapping[str, RolePlan]) -> tuple[float, str]:
    """Samples/s of a job whose processes have cores of their own: those of the slowest role."""
    slowest = min(roles, key=lambda name: roles[name].samples_per_s or math.inf)
    rate, limit = roles[slowest].samples_per_s or 0.0, f"{slowest}: {roles[slowest].limit}"
    ranks = roles[RANKS]
    # What a batch in flight waits for, one after the other: of the loop, only the time that passes.
    passed_s = ranks.cpu_s - _shared_by_torch_s(job, hosts.ranks)
    if hosts.ranks.samples_per_s is not None:
        passed_s += job.batch_size / hosts.ranks.samples_per_s
    passed_s += roles[WORKERS].cpu_s + roles[SERVERS].cpu_s / roles[SERVERS].count
    for name in (RANKS, WORKERS, SERVERS):
        role: Role = getattr(hosts, name)
        num_bytes = roles[name].sent_bytes / (roles[SERVERS].count if name == SERVERS else 1)
        passed_s += num_bytes * 8e-9 / (role.network_gbit or math.inf)
    # By Little's law: the throughput of a bounded number of batches is that number by the time that each
    # takes.
    in_flight = ranks.count * job.in_flight * job.batch_size / passed_s
    return (in_flight, f"{RANKS}: batches in flight") if in_flight < rate else (rate, limit)


def _shared_by_torch_s(job: Job, rank: Role) -> float:
    """Processor time of the dense model that threads of torch take off the loop, on the cores of a rank."""
    return job.dense_cpu_s * (1 - 1 / max(1.0, rank.cores or 1))


def _rate(role: Role, batch_size: int, cpu_s: float, thread_s: float, num_bytes: float) -> tuple[float, str]:
    """Samples/s of one process, and what bounds it."""
    rates = {"processor": batch_size * (role.cores or math.inf) / max(cpu_s, 1e-12)}
    if thread_s:
        rates["thread"] = batch_size / thread_s
    if role.network_gbit is not None and num_bytes:
        rates["network"] = batch_size * role.network_gbit * 1e9 / 8 / num_bytes
    if role.samples_per_s is not None:
        rates["device"] = role.samples_per_s
    limit = min(rates, key=lambda name: rates[name])
    return rates[limit], limit
