"""Which words of a command line are the script, and which its arguments."""

import pytest

from persia.errors import InvalidArgumentError, NotFoundError
from persia.launcher.script import script_and_arguments


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def test_the_first_word_is_the_script(script):
    assert script_and_arguments([script, "--lr", "1"], "other.py", "X") == (script, ["--lr", "1"])


def test_without_words_the_variable_names_it(script):
    assert script_and_arguments([], script, "X") == (script, [])


def test_options_go_to_the_script_of_the_variable(script):
    assert script_and_arguments(["--lr", "1"], script, "X") == (script, ["--lr", "1"])


def test_no_script_names_the_variable():
    with pytest.raises(InvalidArgumentError, match="PERSIA_NN_WORKER_ENTRY"):
        script_and_arguments([], None, "PERSIA_NN_WORKER_ENTRY")


@pytest.mark.parametrize("words", [["missing.py"], ["."]])
def test_a_script_that_is_no_file_is_refused(words):
    with pytest.raises(NotFoundError, match="is not a file"):
        script_and_arguments(words, None, "X")
