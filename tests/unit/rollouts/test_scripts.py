from __future__ import annotations

from turnwise.processes.limited import with_script


def test_an_interpreters_script_is_found_from_the_current_directory_unless_the_working_directory_has_it(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").touch()
    work = tmp_path / "work"
    work.mkdir()
    assert with_script(["/usr/bin/python3.11", "agent.py", "x"], None) == [
        "/usr/bin/python3.11",
        str(tmp_path / "agent.py"),
        "x",
    ]
    assert with_script(["python", "agent.py"], work) == ["python", str(tmp_path / "agent.py")]
    (work / "agent.py").touch()
    assert with_script(["python", "agent.py"], work) == ["python", "agent.py"]


def test_other_arguments_mean_the_runs_own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answer.txt").touch()
    for command in (["cat", "answer.txt"], ["python", "-c", "answer.txt"], ["python", "missing.py"], ["python"]):
        assert with_script(command, None) == command
