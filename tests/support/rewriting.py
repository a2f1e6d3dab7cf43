"""Import this before test modules, and their asserts show values, as in the process of pytest."""

from _pytest.assertion import install_importhook
from _pytest.config import get_config

install_importhook(get_config())  # no public function of pytest does this
