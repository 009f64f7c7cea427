"""The failures of the conformance kit over our own backends."""

from holdfast.harness.conformance.failures import *  # noqa: F403
