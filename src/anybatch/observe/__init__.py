"""Observation of steps: gradient flow, noise, memory; the report of a run. The only package that draws."""

from anybatch.observe import figure, memory
from anybatch.observe.flow import GradientFlow, gradient_flow
from anybatch.observe.flow_figures import Flow
from anybatch.observe.noise import GradientNoise
from anybatch.observe.report import report_page

__all__ = ["Flow", "GradientFlow", "GradientNoise", "figure", "gradient_flow", "memory", "report_page"]
