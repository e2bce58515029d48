"""What `fresh` starts: measures one task and writes its row, or its error, down."""

import importlib
import json
import resource
import sys
import traceback
from pathlib import Path


def main(module: str, task: str, target: str, nbytes: str) -> int:
    resource.setrlimit(resource.RLIMIT_DATA, (int(nbytes), int(nbytes)))
    try:
        row = importlib.import_module(module).measure(json.loads(task))
    except Exception as error:
        traceback.print_exc()
        message = str(error).strip().splitlines() or [""]
        row = {"error": f"{type(error).__name__}: {message[0]}"}
    Path(target).write_text(json.dumps(row))
    return int("error" in row)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
