"""Rewards of single-turn tasks: functions of texts, rubrics, and code of the user's."""
