"""Hands over to setup.cfg; needed by installers that know no other way."""

from setuptools import setup

setup()
