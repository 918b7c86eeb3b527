"""Settings of the processes of a chaos run: a pure function of the environment."""

from example_project import databases
from tests.chaos.scene import Scene

_scene = Scene.read()

SECRET_KEY = "for tests only"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["jobqueue", "tests.chaos"]
DATABASES = {"default": _scene.database}
JOBQUEUE = {
    "LEASE": _scene.lease,
    "POLL": 0.1,
    "GRACE": 3.0,
    "THREADS": 4,
    "SWEEP_INTERVAL": 2.0,
    "CLAIM_TIMEOUT": 2.0,
    "TIMEOUT_GRACE": 0.5,
    "MAX_ATTEMPTS": 4,
    "BACKOFF": {"base": 0.1, "factor": 2.0, "cap": 0.5, "jitter": 0.5},
}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"short": {"format": "%(asctime)s %(levelname)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "short"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
}

if _scene.database["ENGINE"] == databases.BACKENDS["mysql"]:
    databases.use_pymysql_without_mysqlclient()
