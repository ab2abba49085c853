"""A course: live commands by lecture topic, and assignments with graders."""
