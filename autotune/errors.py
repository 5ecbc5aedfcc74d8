"""Errors on the way from a job file to a running training.

AutotuneError           base of those of `storage.errors` and of `trials.errors`, too
|-- JobError           the job file cannot be used
|-- HardwareError      the job asks for devices that this machine does not have
|-- NoFeasiblePlan     no plan fits the devices' memory and the job's settings
|-- TrialsKeepFailing  several trials in a row failed, and another plan would not help
|-- ProfileError       a profile of the layers cannot be used
|-- PlanNotValid       the plan to launch does not hold here, or none is known
|-- NotCertified       the certificate of the plan to launch does not hold, or could not be made
|-- LaunchFailed       a rank of the full training failed
|   `-- PlanFailed     before its first checkpoint, perhaps by its plan
|-- PackError          the lengths, or the file for the packs or the plot, cannot be used
|-- PredictError       the plan to predict cannot be used, or nothing is known of the devices
|-- RecommendError     no data sheet, or no number of devices, is as asked for
|-- ExportError        another trainer can hold nothing of the plan, the data or the job, or the folder is taken
|-- NoProfile          the layers of the model were not profiled on the hardware to predict for
|-- DatabaseFaulty     a check of the database found something wrong
`-- DeviceBusy         other processes use the devices, so that measurements would not hold
"""

from storage.errors import (
    AmbiguousId,
    BadAnnotation,
    BadBundle,
    BadUrl,
    DatabaseUnavailable,
    OtherVersion,
    StudyInUse,
    Superseded,
    UnfinishedStudy,
    UnknownRecord,
)
from trials.errors import AutotuneError, NoCompiler, NoDecoder, NodeRefused, OutputTaken, SiteError, UnknownName


class JobError(AutotuneError):
    """The job file cannot be used; the message lists every problem in it."""


class HardwareError(AutotuneError):
    """The job asks for devices that this machine does not have."""


class NoFeasiblePlan(AutotuneError):
    """No plan fits the devices' memory and the job's settings."""


class TrialsKeepFailing(AutotuneError):
    """Several trials in a row failed, and another plan would not help."""


class ProfileError(AutotuneError):
    """A profile of the layers has impossible values, or is of another model."""


class PlanNotValid(AutotuneError):
    """The plan to launch does not hold here, or none is known."""


class NotCertified(AutotuneError):
    """The certificate of the plan to launch does not hold, or could not be made."""


class LaunchFailed(AutotuneError):
    """A rank of the full training failed; its checkpoints stay."""


class PlanFailed(LaunchFailed):
    """A rank failed before the first checkpoint of the launch, for a reason that another plan may not have."""

    def __init__(self, message: str = "", reason: str = "") -> None:
        """`reason` is what failed, for messages."""
        super().__init__(message)
        self.reason = reason


class PackError(AutotuneError):
    """The input of `autotune pack INPUT` cannot be used with these options, or a file cannot be written."""


class PredictError(AutotuneError):
    """The plan to predict cannot be used, or nothing is known of the devices."""


class RecommendError(AutotuneError):
    """No data sheet, or no number of devices, is as asked for."""


class ExportError(AutotuneError):
    """Another trainer can hold nothing of the plan, or would train otherwise; or the folder for it cannot be made."""


class NoProfile(AutotuneError):
    """The layers of the model were not profiled on the hardware to predict for."""


class DatabaseFaulty(AutotuneError):
    """A check of the database found something wrong."""


class DeviceBusy(AutotuneError):
    """Other processes use the devices, so that measurements would not hold."""


# 1 is Python's own for an exception, and 2 is click's for wrong usage; 3 to 6 are free in both.
_FAILURE = 1
_EXIT_CODES: dict[type[Exception], int] = {
    JobError: 2,
    HardwareError: 2,
    ProfileError: 2,
    PackError: 2,
    PredictError: 2,
    RecommendError: 2,
    ExportError: 2,
    UnknownName: 2,
    OutputTaken: 2,
    SiteError: 2,
    NoCompiler: 2,
    NoDecoder: 2,
    NodeRefused: 2,
    BadUrl: 2,
    BadBundle: 2,
    BadAnnotation: 2,
    UnfinishedStudy: 2,
    AmbiguousId: 2,
    UnknownRecord: 2,
    NoFeasiblePlan: 3,
    PlanNotValid: 3,
    NotCertified: 3,
    NoProfile: 3,
    DatabaseUnavailable: 4,
    OtherVersion: 5,
    DeviceBusy: 6,
    Superseded: 6,
    StudyInUse: 6,
}


def exit_code(error: Exception) -> int:
    """Return the exit code of `autotune` for an error: 2 for wrong input, others as listed above, 1 for the rest."""
    return next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), _FAILURE)
