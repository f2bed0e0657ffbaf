"""The processes of a job agree on its worlds: after a death, a join, a leave or a resize they form the next one."""
