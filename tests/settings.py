"""Settings of the test suite: one database alias per engine.

A pure function of the environment. A child process that inherits the environment sees the same
databases, since they bear the same name in and out of tests.
"""

from example_project import databases
from tests import servers
from tests.servers import run_dir

SECRET_KEY = "for tests only"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.urls"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
# A word to sleeping workers is one more query; tests that are about it turn it on.
JOBQUEUE: dict[str, object] = {"NOTIFY": False}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "jobqueue",
]

MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASES = {
    "default": databases.sqlite(run_dir() / "test_jobqueue.sqlite3"),
    **{
        alias: server.settings("test_jobqueue")
        for alias, server in servers.session_servers().items()
    },
}
for entry in DATABASES.values():
    # Without DEPENDENCIES, tests of one engine could not run without those of the default one.
    entry["TEST"] = {"NAME": entry["NAME"], "DEPENDENCIES": []}
if "mariadb" in DATABASES:
    databases.use_pymysql_without_mysqlclient()

DATABASE_ROUTERS = ["tests.routers.CurrentAliasRouter"]
