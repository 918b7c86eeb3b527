"""The settings of the tests, with the pair of servers whose directories the environment names."""

import os

from tests.failover.standby import ALIAS, HOSTS_VARIABLE, multi_host
from tests.settings import *  # noqa: F403
from tests.settings import DATABASES as OTHERS

# No other: their servers may not run.
DATABASES = {"default": OTHERS["default"], ALIAS: multi_host(os.environ[HOSTS_VARIABLE])}
