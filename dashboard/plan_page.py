"""The page at `/plan`. A file of its own: Streamlit knows pages by their files."""

from dashboard.dashboard_settings import DashboardSettings
from dashboard.plan.page import plan

plan(DashboardSettings.load())
