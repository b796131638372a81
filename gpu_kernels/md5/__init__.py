"""MD5 of several streams at a time: what stores ask for, at the price of one."""
