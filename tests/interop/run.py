"""Runs every third-party client against one stack; the last line is ``N passed, N failed``."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "system"))

from stack import running  # noqa: E402


def main() -> int:
    python, node_modules = Path(sys.argv[1]), Path(sys.argv[2])
    passed = failed = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder) / "run", {"engine.exact": True}) as stack,
    ):
        base_url = f"{stack.http}/v1"
        commands = {
            name: [str(python), str(HERE / "clients.py"), name, base_url, stack.model]
            for name in ("langchain", "litellm", "llama_index")
        }
        if shutil.which("node") and node_modules.is_dir():
            script = shutil.copy(HERE / "openai.mjs", node_modules.parent / "openai.mjs")
            commands["openai-node"] = ["node", str(script), base_url, stack.model]
        for name, command in commands.items():
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            ok = done.returncode == 0
            passed, failed = passed + ok, failed + (not ok)
            print(f"{name}: {'passed' if ok else 'FAILED'}")
            if not ok:
                print(done.stdout[-2000:], done.stderr[-2000:])
    print(f"{passed} passed, {failed} failed")
    return 0 if failed == 0 and passed else 1


if __name__ == "__main__":
    sys.exit(main())
