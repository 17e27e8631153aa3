"""The transport of every test: one secret, which tests/conftest.py gives to Settings as well."""

from services.common.transport import Transport

SECRET = "the-internal-secret-of-all-tests"
TRANSPORT = Transport(SECRET)
