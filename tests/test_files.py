"""Results are written whole or not at all, and take the place of no file of the user's."""
from contextlib import suppress
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from support.loading import load_checked
from cli.trace import make_page
from common import InputError
from helpers import ROOT, check_refused, interrupting
from support.files import PAGE, check_result, write_text, write_whole
from support.released import read_head

KEPT = r'\{"prompt": \['  # how a file begins with which a stopped run goes on
OTHERS = [*((ROOT / x).read_text() for x in (".github/decode.svg", "cli/trace.html")), "", "a",
          '{"prompt": "a"}\n', '{\n "a": 1}', "<!doctype html><title>Mine</title>"]


@pytest.mark.parametrize("text, taken", [
    (make_page([], {}), [PAGE]), ('{"prompt": [3], "answer": [5], "drafted": 2}\n', [KEPT]),
    *((text, []) for text in OTHERS)])
def test_nothing_that_is_there_is_replaced(text, taken, tmp_path):
    """Two kinds of file are taken all the same: a page that is made again, and a file with which a
    stopped run goes on."""
    file, found = tmp_path / "file", []
    file.write_text(text)
    for begins in "", PAGE, KEPT:
        with suppress(InputError):
            check_result("out", file, begins)
            found.append(begins)
    assert found == taken and file.read_text() == text
    for place, said in (tmp_path, "Is a directory"), (file / "x", "nothing can be written into"):
        check_refused(f"a new place for --out, got .*{said}", check_result, "out", place)


def write_folder(fresh) -> None:
    fresh.mkdir(exist_ok=True)  # as `save_pretrained` does
    (fresh / "config.json").write_text("new")


def test_a_result_is_whole_or_the_old_one_stays(tmp_path):
    """It can go to a file through a link. The new one is made beside its place, since nothing can
    be moved from one disk to another, and a folder that has appeared there is not replaced."""
    file, folder = tmp_path / "deep" / "file", tmp_path / "folder"
    write_text(file, "old")
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, interrupting(lambda fresh: fresh.write_text("half"), 1))
    assert file.read_text() == "old"
    write_text(tmp_path / "link", "new")
    assert file.read_text() == "new" and [*file.parent.iterdir()] == [file]
    write_whole(folder, write_folder)
    with pytest.raises(OSError):
        write_whole(folder, write_folder)
    assert (tmp_path / ".new-folder/config.json").read_text() == "new"  # nothing is lost


@pytest.mark.parametrize("leave", [
    lambda fresh: fresh.write_text("half"), lambda fresh: fresh.symlink_to(fresh.parent),
    lambda fresh: (fresh / "deep").mkdir(parents=True)], ids=["a file", "a link", "a folder"])
def test_what_a_killed_run_has_left_is_no_part_of_a_result(leave, tmp_path):
    for name in "folder", "text":
        leave(tmp_path / f".new-{name}")
    write_whole(tmp_path / "folder", write_folder)
    write_text(tmp_path / "text", "new")
    assert [x.name for x in (tmp_path / "folder").iterdir()] == ["config.json"]
    assert (tmp_path / "text").read_text() == "new"
    assert {x.name for x in tmp_path.iterdir() if not x.is_symlink()} == {"folder", "text"}


def test_what_is_written_has_the_mode_of_a_new_file_or_that_of_the_one_it_replaces(tmp_path):
    """Whatever the writer gave it: safetensors lets nobody else read."""
    def write(fresh) -> None:
        save_file({"w": torch.zeros(2)}, fresh)
    for name in "old", "usual":
        (tmp_path / name).write_text("")
    (tmp_path / "old").chmod(0o620)
    for name in "old", "new":
        write_whole(tmp_path / name, write)
    write_whole(tmp_path / "folder", lambda fresh: (fresh.mkdir(), write(fresh / "in it")))
    modes = [(tmp_path / x).stat().st_mode for x in ("old", "usual", "new", "folder/in it")]
    assert modes[0] & 0o777 == 0o620 and modes[1] == modes[2] == modes[3]


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch):
    """It is asked for seconds, not for a minute, and only where nothing of the model or of the
    released head lies here."""
    session = Mock(**{"head.side_effect": OSError("no\n network")})
    monkeypatch.setattr("support.files.hub.get_session", lambda: session)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained",
                        Mock(side_effect=OSError("not here")))
    for act in lambda: load_checked("nope/model", None, None), lambda: read_head("nope/model", ""):
        check_refused("no such directory, got 'nope/model': no network$", act)
    for path in str(ROOT / "models/target"), "nope/model":
        check_refused("not here$", load_checked, path, None, None)
        monkeypatch.setattr("support.files.hub.try_to_load_from_cache", lambda path, name: name)
    assert [call.kwargs["timeout"] < 10 for call in session.mock_calls] == [True, True]
