"""What handlers write in ``context.atomic()``: exactly once for each completion."""

from django.db import models


class Effect(models.Model):
    """One effect, with the execution that had it: the job's id and the version it ran under."""

    job_id = models.BigIntegerField()
    version = models.BigIntegerField()
    token = models.CharField(max_length=100)

    def __str__(self) -> str:
        return f"effect of job {self.job_id} at version {self.version}"
