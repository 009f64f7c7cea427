"""Scenarios as data: files, fault types, schedules."""
