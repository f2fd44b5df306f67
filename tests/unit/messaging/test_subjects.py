"""Subjects keep jobs apart and cannot be forged by names."""

import pytest

from persia.errors import InvalidArgumentError
from persia.messaging.subjects import EMBEDDING_WORKER, ROLES, Subjects


def test_subjects_are_those_of_the_wire_format():
    subjects = Subjects("my-job")
    assert subjects.advertise(EMBEDDING_WORKER) == "persia.my-job.advertise.embedding-worker"
    assert subjects.who(EMBEDDING_WORKER) == "persia.my-job.who.embedding-worker"
    assert subjects.ids(3) == "persia.my-job.ids.3"
    assert subjects.batch(0) == "persia.my-job.batch.0"
    assert subjects.end(1) == "persia.my-job.end.1"
    assert subjects.replica(2, "all") == "persia.my-job.replica.2.all"


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "a\n", "ä"])
def test_job_names_that_would_meet_other_jobs_are_refused(name):
    with pytest.raises(InvalidArgumentError, match="PERSIA_JOB_NAME"):
        Subjects(name)


def test_unknown_roles_and_negative_indices_are_refused():
    subjects = Subjects("job")
    with pytest.raises(InvalidArgumentError, match="embedding-parameter-server"):
        subjects.who("server")
    with pytest.raises(InvalidArgumentError, match="-1"):
        subjects.batch(-1)


def test_roles_are_five():
    assert len(set(ROLES)) == 5
