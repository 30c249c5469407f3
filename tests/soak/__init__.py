"""A whole service under load and faults for minutes or hours: does anything grow that should not?"""
