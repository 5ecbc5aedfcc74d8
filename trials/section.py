"""What the sections of a job have in common."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from trials.units import parse_bytes, parse_seconds, size_setting, time_setting

Bytes = Annotated[
    int, BeforeValidator(parse_bytes, json_schema_input_type=str), Field(gt=0), PlainSerializer(size_setting)
]
Seconds = Annotated[
    float, BeforeValidator(parse_seconds, json_schema_input_type=str), Field(gt=0), PlainSerializer(time_setting)
]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )
