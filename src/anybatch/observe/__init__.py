"""Observation of steps: gradient flow, noise, memory; the report of a run. The only package that draws."""

from anybatch.observe import figure as figure, memory as memory
from anybatch.observe.flow import GradientFlow as GradientFlow, gradient_flow as gradient_flow
from anybatch.observe.flow_figures import Flow as Flow
from anybatch.observe.noise import GradientNoise as GradientNoise
from anybatch.observe.report import report_page as report_page
