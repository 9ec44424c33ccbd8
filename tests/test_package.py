"""What travels in the wheel."""

import subprocess
import sys
import zipfile
from pathlib import Path

from processes import ROOT


def test_scenarios_prompts_and_locustfiles_travel_in_the_wheel(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    # From there, and not from the checkout: the scenario is found, and so are its prompts.
    script = (
        "import vllm_locust.scenario as s; plan = s.load('mixed');"
        "print(s.__file__, *(f'{part.name}={len(part.prompts)}' for part in plan.parts))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=installed
    ).stdout.split()
    assert printed[0].startswith(str(installed))
    assert printed[1:] == ["short=64", "long=24", "longform=32"]
    path = subprocess.run(
        [sys.executable, "-m", "vllm_locust", "path", "mixed.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd=installed,
    ).stdout.strip()
    assert Path(path) == installed / "vllm_locust" / "locustfiles" / "mixed.py"
    assert (installed / "vllm_locust" / "assets" / "run.schema.json").is_file()
