"""The file for spark-submit: `spark-submit spark_jobs/submit.py ingest ...` runs `minibroker spark ingest ...`.

`--command-config FILE` comes before the name of the job, as it does after `minibroker`.
"""

import sys

from minibroker.client.cli.commands import options
from minibroker.client.cli.terminal.output import run_app
from minibroker.spark_jobs.cli import app

if __name__ == "__main__":
    app.callback()(options)
    sys.exit(run_app(app, sys.argv[1:]))
