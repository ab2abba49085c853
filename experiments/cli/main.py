"""The command line where nothing is installed: `python -m experiments.cli.main`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxkv.cli.main", run_name="__main__", alter_sys=True)
