"""Runs exchanges during backward, for any wrapper: groups, lanes, residuals. It uses neither DDP nor Lightning."""
