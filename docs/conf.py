"""How the documentation is built: ``sphinx-build -W docs docs/_build/html``. Downloads nothing."""

import django
from django.conf import settings

from jobqueue import __version__

# Autodoc imports the models, which need an installed app and no database.
settings.configure(INSTALLED_APPS=["jobqueue"], USE_TZ=True)
django.setup()

project = "django-jobqueue"
author = "the django-jobqueue contributors"
project_copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

# Headings can be linked to by their text: [..](fence.md#the-comparison).
myst_heading_anchors = 3

# Docstrings say what a value is; signatures say its type.
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"django-jobqueue {version}"
html_static_path = ["_static"]
