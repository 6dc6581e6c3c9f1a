"""What a job's noise is worth: the accountant, and the promise that it backs."""
