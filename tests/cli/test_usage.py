"""What is refused, and how: before any work, in one line, with the right code, and without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from parverify import errors
from parverify.cli import COMMANDS, EXIT_CODES, cli
from parverify.cli.outcome import EXIT_DECIDED, EXIT_ERROR, EXIT_TIMEOUT, EXIT_UNKNOWN, Outcome
from parverify.verdict import Verdict
from tests.cli.conftest import ROOT, Files

Make = Callable[[str], Files]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nonsense"], "nonsense"),
        (["run"], "Missing argument 'MODEL'"),
        (["run", "a", "b", "--frobnicate"], "--frobnicate"),
        (["run", "a", "b", "--timeout", "0"], "'0' is not a positive, finite number of seconds"),
        (["run", "a", "b", "--timeout", "nan"], "not a positive, finite"),
        (["run", "a", "b", "--timeout", "soon"], "'soon' is not a number of seconds"),
        (["run", "a", "b", "--memory", "2 apples"], "'2 apples' is not an amount of memory"),
        (["run", "a", "b", "--method", "magic"], "magic"),
        (["run", "a", "b", "--dtype", "float16"], "float16"),
        (["run", "a", "b", "--seed", "-1"], "-1"),
        (["run", "a", "b", "--json", "-"], "stdout holds the verdict"),
        (["run", "a", "b", "--json", "./c", "--results-file", "c"], "--json: ./c is the same file as --results-file c"),
        (["run", "a", "b", "--journal", "j", "--resume", "j"], "--journal and --resume are both given"),
        (["run", "a", "b", "--restarts", "1"], "--restarts needs a journal"),
        (["run", "--list", "l", "--results-dir", "d", "--resume", "j"], "go with one instance"),
        (["run", "--list", "l", "--results-dir", "d", "--restarts", "1"], "go with one instance"),
        (["run", "a", "b", "--results-file", "-"], "--results-file: - is no file"),
        (["run", "a", "b", "--nproc", "100000"], "100000 is not in the range"),
        *((["run", "a", "b", option, ""], f"'{option}': the name is empty") for option in ("--journal", "--config")),
        (["plan", "a", "b", "--unstable", "nan"], "'nan' is not a number from 0 to 1"),
        (["plan", "a", "b", "--nodes", "2"], "--nodes goes with --simulate"),
        (["plan", "a", "b", "--simulate", "2", "--start", "n"], "--start goes without --simulate"),
        (["run", "a", "b", "--results-file", ""], "--results-file: the name is empty"),
        (["bounds", "a", "b", "--method", "beta-crown"], "beta-crown"),
        (["bench", "nowhere", "--out", "x"], "no instances.csv in nowhere"),
        (["bench", "nowhere", "--out", "x", "--timeout", "1", "--timeout-scale", "2"], "exclude each other"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(arguments: list[str], text: str) -> None:
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and text in result.stderr
    assert result.stderr.count("hint: ") == 1


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_every_kind_of_error_that_is_shown_has_a_hint(kind: type[errors.ParverifyError]) -> None:
    first = [("node", "Odd")] if kind is errors.UnsupportedOperatorError else "odd"
    error = kind("odd", [1]) if kind is errors.DisagreementError else kind(first)  # type: ignore[call-arg, arg-type]
    shown = kind not in (errors.StoppedError, errors.OutOfTimeError)
    assert str(error).count("; hint: ") == shown
    if kind is errors.UsageError:
        assert str(kind("odd", "do that")) == str(kind("odd; hint: do that")) == "odd; hint: do that"


def test_a_full_disk_is_not_called_a_fault_of_parverify() -> None:
    outcome = Outcome.of(OSError(28, "No space left on device", "/tmp/a"))
    assert (outcome.verdict, outcome.exit_code) == ("error", 20)
    assert outcome.reason.startswith("No space left on device (/tmp/a); hint: this is the machine's limit")


def test_a_message_is_printable() -> None:
    assert Outcome.error("a\n b\x00\x1b[2J é").reason == "a b\\x00\\x1b[2J é"


@pytest.mark.parametrize(
    ("target", "code", "text"),
    [("| true", 0, ""), ("> /dev/full", 20, "error: can't write to stdout: No space left on device; hint: ")],
)
def test_a_stdout_that_takes_nothing(target: str, code: int, text: str) -> None:
    script = "import time\ntime.sleep(0.2)\nfrom parverify.cli import main\nmain()"  # the reader is gone by then
    command = f'"{sys.executable}" -c "{script}" --help {target}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(text) and done.stderr.count("\n") == bool(text)


@pytest.mark.parametrize("option", ["--results-file", "--json"])
@pytest.mark.parametrize("given", ["model", "spec", "gz", "link", "config"])
def test_no_input_is_overwritten(files: Make, option: str, given: str) -> None:
    made = files("unsat")
    target = made.spec if given == "spec" else made.model
    extra = []
    if given == "gz":
        target = made.model.rename(f"{made.model}.gz")
    if given == "link":
        target = made.folder / "link"
        target.symlink_to(made.model)
    if given == "config":
        target = made.folder / "c.toml"
        target.write_text("")
        extra = ["--config", str(target)]
    before = target.read_bytes()
    result = call("run", str(made.model), str(made.spec), option, str(target), *extra)
    assert (result.exit_code, result.stdout, target.read_bytes()) == (2, "", before)
    assert "is the same file as" in result.stderr
    if option == "--json":
        result = call("bounds", str(made.model), str(made.spec), option, str(target), *extra)
        assert (result.exit_code, result.stdout, target.read_bytes()) == (2, "", before)


@pytest.mark.parametrize(("name", "text"), [("gone.onnx", "no such file"), ("folder", "is a folder, not a file")])
def test_missing_files_are_named_before_torch_is_loaded(files: Make, name: str, text: str) -> None:
    made = files("unsat")
    (made.folder / "folder").mkdir()
    other = str(made.folder / name)
    spec, model = str(made.spec), str(made.model)
    for arguments in (["run", other, spec], ["run", model, other], ["bounds", other, spec], ["supports", other]):
        script = f"import sys\nfrom parverify.cli import cli\nprint(cli.main({arguments!r}, standalone_mode=False))\n"
        script += "print(sorted({'torch', 'numpy', 'onnx'} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
        code = 23 if arguments[1] == model else 21
        assert done.stdout.splitlines()[-2:] == [str(code), "[]"], done.stdout
        assert text in done.stderr and "; hint: " in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["run", "run on 2 ranks", "bounds", "plan", "plan --simulate 2"])
def test_an_absent_device_is_named(
    api: types.ModuleType, files: Make, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    api.verify = api.bounds_report = None  # type: ignore[attr-defined]
    made = files("")
    extra = {"run": ["--in-process"], "run on 2 ranks": ["--in-process", "--nproc", "2"]}.get(command, [])
    name, *more = command.partition(" on ")[0].split()
    result = call(name, str(made.model), str(made.spec), "--device", "cuda", *more, *extra)
    assert result.exit_code == 2
    assert result.stderr == "error: device: cuda is not available on this machine; hint: use --device cpu\n"


def test_an_unwritable_report_is_refused_before_any_work(api: types.ModuleType, files: Make) -> None:
    made = files("")
    result = call("bounds", str(made.model), str(made.spec), "--json", "/proc/report")
    assert result.exit_code == 2 and "--json: can't write /proc/report" in result.stderr


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (["--set", "alpha.iteration=3"], "unknown key 'iteration' in --set alpha.iteration=3; allowed in [alpha]"),
        (["--set", "alpha.iterations"], "has no '='"),
        (["--set", "alpha.lr=fast"], "'fast' is not of type float"),
        (["--config", "missing.toml"], "can't read the configuration missing.toml"),
    ],
)
def test_bad_settings_are_an_error_in_the_results_file_too(files: Make, extra: list[str], text: str) -> None:
    made = files("unsat")
    result = call(*made.arguments(*extra))
    assert (result.exit_code, result.stdout) == (2, "error\n")
    assert text in result.stderr and made.results.read_text() == "error\n"


def test_missing_files(files: Make) -> None:
    made = files("unsat")
    made.spec.unlink()
    result = call(*made.arguments())
    assert (result.exit_code, made.results.read_text()) == (23, "error\n") and "no such file" in result.stderr
    made.model.unlink()
    assert call(*made.arguments()).exit_code == 21


def test_places_where_no_results_file_can_be(files: Make) -> None:
    made = files("unsat")
    for place in ("/dev/null", str(made.folder), str(made.model / "below" / "results.txt")):
        result = call("run", str(made.model), str(made.spec), "--results-file", place)
        assert (result.exit_code, result.stdout) == (2, "") and "--results-file" in result.stderr
    assert made.model.read_text() == "no network"
    assert Path("/dev/null").is_char_device()


def test_help_lists_the_exit_codes_and_every_command() -> None:
    text = call("--help").stdout
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    for code in {kind.exit_code for kind in classes if issubclass(kind, errors.ParverifyError)} | {EXIT_UNKNOWN}:
        assert f"{code:4d}  " in EXIT_CODES and f"{code:4d}  " in text
    assert all(name in text for name in COMMANDS)
    assert call().stdout == text
    for name in COMMANDS:
        assert call(name, "--help").exit_code == 0


def test_words_and_codes_agree_with_the_engine() -> None:
    made = [Outcome("sat"), Outcome("unsat"), Outcome.unknown("r"), Outcome.timeout("r"), Outcome.error("r")]
    assert {outcome.verdict: outcome.exit_code for outcome in made} == {v.value: v.exit_code for v in Verdict}
    assert (EXIT_DECIDED, EXIT_UNKNOWN, EXIT_TIMEOUT, EXIT_ERROR) == (0, 11, 12, 20)


def test_an_outcome_survives_the_pipe() -> None:
    outcome = Outcome("sat", 0, "", [0.1, 1 / 3, 5e-324], [-0.0], {"seconds": 0.25})
    assert Outcome.decode(outcome.encode()) == outcome


def test_help_and_usage_errors_import_nothing_heavy() -> None:
    script = (
        "import sys\nfrom parverify.cli import cli\n"
        "cli.main(['run', '--help'], standalone_mode=False)\ncli.main(['run', 'x', '--no'], standalone_mode=False)\n"
        "print(sorted({'torch', 'numpy', 'rich', 'onnx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[]\n")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An empty `parverify.api`, to be filled by a test."""
    module = types.ModuleType("parverify.api")
    monkeypatch.setitem(sys.modules, "parverify.api", module)
    return module


LAYER = {"name": "relu1", "op": "Relu", "neurons": 2, "unstable": 1, "lower": [-1.0, 0.0], "upper": [1.0, 3.0]}
REPORT = {
    "method": "crown",
    "strategy": "single",
    "world_size": 1,
    "dtype": "float32",
    "lower": [-1.5],
    "upper": [float("inf")],
    "layers": [LAYER],
    "digest": "00",
    "seconds": 0.5,
    "ranks": [{"peak_bytes": 1, "resident_bytes": 1, "collectives": {}}],
}


def test_bounds(api: types.ModuleType, files: Make) -> None:
    seen = {}

    def bounds_report(model: str, spec: str, **options: object) -> dict[str, object]:
        seen.update(options)
        return REPORT

    api.bounds_report = bounds_report  # type: ignore[attr-defined]
    made = files("")
    result = call("bounds", str(made.model), str(made.spec), "--json", "-")
    assert result.exit_code == 0
    layer = {key: LAYER[key] for key in ("name", "op", "neurons", "unstable")}
    assert json.loads(result.stdout) == {**REPORT, "upper": ["inf"], "layers": [layer]}
    assert "Y_0" in result.stderr and "-1.5" in result.stderr and "relu1" in result.stderr
    assert seen["settings"].method == "crown"
    arguments = ["--layers", "--method", "ibp", "--json", str(made.json)]
    result = call("bounds", str(made.model), str(made.spec), *arguments)
    assert result.stdout == "" and "max width" in result.stderr and seen["settings"].method == "ibp"
    assert json.loads(made.json.read_text())["layers"] == [LAYER]


@pytest.mark.parametrize("broken", [{"digest": None}, {"upper": []}, {"layers": [{**LAYER, "lower": [0.0]}]}])
def test_bounds_of_a_broken_report_are_an_error(api: types.ModuleType, files: Make, broken: dict[str, object]) -> None:
    report = {key: value for key, value in {**REPORT, **broken}.items() if value is not None}
    api.bounds_report = lambda model, spec, **options: report  # type: ignore[attr-defined]
    made = files("")
    result = call("bounds", str(made.model), str(made.spec), "--json", str(made.json))
    assert (result.exit_code, len(result.stderr.splitlines()), made.json.exists()) == (20, 1, False)


def test_bounds_fails_with_the_code_of_the_error(api: types.ModuleType, files: Make) -> None:
    def bounds_report(model: str, spec: str, **options: object) -> dict[str, object]:
        raise errors.SpecError("odd", line=3, column=1)

    api.bounds_report = bounds_report  # type: ignore[attr-defined]
    made = files("")
    result = call("bounds", str(made.model), str(made.spec))
    assert result.exit_code == 23 and result.stderr.startswith("error: line 3, column 1: odd; hint: SPEC is VNN-LIB")


def test_supports(api: types.ModuleType, tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    api.supported_operators = lambda: ["Relu", "Gemm"]  # type: ignore[attr-defined]
    assert call("supports").stdout == "Gemm\nRelu\n"
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Sin", ["h"], ["y"], name="wave")]
    graph = helper.make_graph(nodes, "g", [value], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])])
    onnx.save(helper.make_model(graph), str(tmp_path / "net.onnx"))
    result = call("supports", str(tmp_path / "net.onnx"))
    assert (result.exit_code, result.stdout) == (22, "Relu\t1\tyes\nSin\t1\tno\n")
    assert "Sin (node wave)" in result.stderr
    api.supported_operators = lambda: ["Relu", "Sin"]  # type: ignore[attr-defined]
    assert call("supports", str(tmp_path / "net.onnx")).exit_code == 0
    (tmp_path / "bad.onnx").write_text("no network")
    assert call("supports", str(tmp_path / "bad.onnx")).exit_code == 21
    assert call("supports", str(tmp_path / "none.onnx")).exit_code == 21
