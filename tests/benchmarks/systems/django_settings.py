"""Django's settings for every system that needs them, out of the variable ``BENCH_DJANGO``."""

from __future__ import annotations

import json
import os

_given = json.loads(os.environ["BENCH_DJANGO"])
_place = _given["place"]

SECRET_KEY = "for benchmarks only"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = _given["apps"]
LOGGING_CONFIG = None
if _place["store"] == "postgresql":
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "HOST": _place["host"],
            "USER": _place["user"],
            "NAME": _place["dbname"],
            "OPTIONS": _place.get("options", {}),
        }
    }
else:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": _place["path"],
            "OPTIONS": _place["options"],
        }
    }
DATABASES["default"]["CONN_MAX_AGE"] = _given.get("conn_max_age", 0)
globals().update(_given.get("settings", {}))
if "BENCH_STEADY_QUEUE" in os.environ:
    import ast
    from datetime import timedelta

    from steady_queue.configuration import Configuration

    _worker = ast.literal_eval(os.environ["BENCH_STEADY_QUEUE"])
    if "polling_seconds" in _worker:
        _worker["polling_interval"] = timedelta(seconds=_worker.pop("polling_seconds"))
    STEADY_QUEUE = Configuration.Options(workers=[Configuration.Worker(**_worker)])
